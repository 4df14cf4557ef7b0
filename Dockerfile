FROM python:3.12-slim
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu \
 && pip install --no-cache-dir ".[all]"
WORKDIR /work
ENTRYPOINT ["ctxext"]
CMD ["demo"]
