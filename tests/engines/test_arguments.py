"""`--engine-args` makes no engine run code or load other files, unless the user trusts them."""

import json

import pytest

from ctxext.engines.arguments import check_arguments
from ctxext.errors import CtxextError

DANGEROUS = {
    "vllm": {
        "skip_tokenizer_init": False,
        "trust_remote_code": True,
        "tokenizer": "them/words",
        "tokenizer_mode": "custom",
        "model": "them/model",
        "hf_overrides": {"auto_map": {"AutoConfig": "them/x--y.Z"}},
        "hf_config_path": "them/x",
        "config_format": "mistral",
        "load_format": "pt",
        "model_loader_extra_config": {},
        "model_impl": "terratorch",
        "worker_cls": "os.system",
        "worker_extension_cls": "theirs.Worker",
        "scheduler_cls": "theirs.Scheduler",
        "logits_processors": ["theirs:Processor"],
        "distributed_executor_backend": "theirs.Executor",
        "speculative_config": {"model": "them/draft"},
        "kv_transfer_config": {"kv_connector_module_path": "theirs"},
        "compilation_config": {"backend": "theirs"},
        "io_processor_plugin": "theirs",
        "generation_config": "them/x",
        "code_revision": "main",
        "download_dir": "/",
        "hf_token": True,
        "unknown": 1,
    },
    "llama.cpp": {
        "model.path": "x.gguf",
        "model.hf_repo": "them/x",
        "model.url": "https://host",
        "lora_adapters": ["x"],
        "chat_template": "{{ x }}",
        "api_keys": [],
        "hostname": "0.0.0.0",
        "public_path": "/",
        "slot_save_path": "/",
        "unknown": 1,
        "cpuparams.__class__": 1,
    },
}
HARMLESS = {
    "vllm": {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.3, "enforce_eager": True, "seed": 2}
    | {"max_model_len": 64, "skip_tokenizer_init": True, "trust_remote_code": False, "model_impl": "vllm"},
    "llama.cpp": {"n_gpu_layers": 0, "cpuparams.n_threads": 8, "verbosity": 3},
}
CASES = [(engine, name, value) for engine, named in DANGEROUS.items() for name, value in named.items()]


@pytest.mark.parametrize(("engine", "name", "value"), CASES)
def test_what_may_run_code_or_load_files_is_refused(engine, name, value, run):
    words = ("--engine", engine, "--engine-args", json.dumps({"seed" if engine == "vllm" else "n_ctx": 1, name: value}))
    message = run("eval", "demo", *words).exception.message
    assert name in message
    assert "may run other code" in message
    if engine == "vllm":
        with pytest.raises(CtxextError, match="may run other code"):
            check_arguments(engine, {name: value})
    check_arguments(engine, {name: value}, trust_remote_code=True)


@pytest.mark.parametrize("engine", HARMLESS)
def test_memory_and_speed_are_the_users(engine):
    check_arguments(engine, HARMLESS[engine])


def test_verify_and_python_refuse_them_too(run, monkeypatch):
    from ctxext.checkpoint.opening import open_checkpoint
    from ctxext.engines import vllm
    from ctxext.served.every_token import compare_in_engine

    monkeypatch.setattr(vllm, "vllm_version", lambda: "1")
    arguments = {"skip_tokenizer_init": False}
    result = run("verify", "demo", "--engine", "vllm", "--engine-args", json.dumps(arguments))
    assert "skip_tokenizer_init" in result.exception.message
    with pytest.raises(CtxextError, match="skip_tokenizer_init"):
        compare_in_engine(open_checkpoint("demo"), {}, arguments=arguments)
