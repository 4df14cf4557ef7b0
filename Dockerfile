# docker build -t ctxext . && docker run --rm -v "$PWD":/work ctxext demo
FROM python:3.12-slim
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
COPY . /src
RUN pip install --no-cache-dir "/src[all]"
WORKDIR /work
ENTRYPOINT ["ctxext"]
CMD ["demo"]
