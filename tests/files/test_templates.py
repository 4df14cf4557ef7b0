"""One way to load the templates of cards and reports."""

import pytest
from jinja2 import UndefinedError

from ctxext.files.templates import load_template


def test_a_template_is_compiled_once_filters_and_finalizes_values_and_refuses_unknown_names(tmp_path, monkeypatch):
    package = tmp_path / "package_of_templates"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "page.txt").write_text("{{ value | twice }}\n{% if value %}\n  yes\n{% endif %}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    template = load_template(package.name, "page.txt", finalize, twice=double)
    assert template.render(value="a") == "<aa>\n  yes\n"
    assert load_template(package.name, "page.txt", finalize, twice=double) is template
    with pytest.raises(UndefinedError, match="value"):
        template.render()


def finalize(value):
    return f"<{value}>"


def double(value):
    return 2 * value
