"""Code that is compiled once is that of its own file, and says its own name."""

import importlib.util
import os
from pathlib import Path

import pytest


def loaded(name: str, text: str):
    path = Path(os.environ["HF_MODULES_CACHE"]) / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, path


def test_the_same_text_keeps_its_own_name():
    text = "def f():\n    return [1 for _ in g()]\n\ndef g():\n    raise ValueError('here')\n"
    for name in ("compiled_first", "compiled_again"):
        module, path = loaded(name, text)
        with pytest.raises(ValueError, match="here") as raised:
            module.f()
        assert {str(entry.path) for entry in raised.traceback[1:]} == {str(path)}
        assert module.f.__code__.co_filename == module.__file__ == str(path)


def test_another_text_is_other_code():
    assert [loaded("compiled_text", f"value = {value}\n# {'x' * value}")[0].value for value in (1, 2, 1)] == [1, 2, 1]


def test_it_is_compiled_once(monkeypatch):
    import compiled_once

    calls = []
    compile_ = compiled_once._source_to_code
    monkeypatch.setattr(
        compiled_once, "_source_to_code", lambda *args, **options: calls.append(1) or compile_(*args, **options)
    )
    for name in ("compiled_one", "compiled_two"):
        assert loaded(name, "value = 'only here'")[0].value == "only here"
    assert len(calls) == 1
