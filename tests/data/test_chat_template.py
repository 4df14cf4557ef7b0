"""A chat template is a program of a stranger's: whatever it does, there is one line, and it ends."""

import contextlib
import resource
import signal
import sys
import time

import pytest

from ctxext.data import chat_template
from ctxext.data.chat_template import render_chat
from ctxext.data.encoding import Encoder
from ctxext.errors import CtxextError
from hand_made import make_tokenizer

SAID = [{"role": "user", "content": "w2"}]
LOOPS = "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def with_template(text):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = text
    return tokenizer


@pytest.mark.parametrize(
    "text", ["{{ 1 / 0 }}", "{% if %}", "{{ x.y.z }}", "{{ messages[9].content }}", "{{ range('x') }}"]
)
def test_a_template_that_fails(text):
    with pytest.raises(CtxextError, match="chat template cannot be rendered") as caught:
        Encoder(with_template(text)).encode_frame("a", "What? It is")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["{{ messages[0].content }}", "{{ 1 / 0 }}"])
def test_the_alarm_is_off_and_as_before_afterwards(text):
    """One that stays armed ends whatever comes next, minutes later."""
    before = signal.getsignal(signal.SIGVTALRM)
    with contextlib.suppress(CtxextError):
        render_chat(with_template(text), SAID)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) is before


def test_a_template_that_does_not_end(monkeypatch):
    monkeypatch.setattr(chat_template, "_SECONDS", 0.3)
    begun = time.process_time()
    with pytest.raises(CtxextError, match=r"it ran for more than 0\.3 seconds"):
        render_chat(with_template(LOOPS), SAID)
    assert time.process_time() - begun < 3
    assert render_chat(with_template("{{ messages[0].content }}"), SAID) == "w2"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no limit of memory for a process there")
@pytest.mark.parametrize(
    "text",
    [
        "{{ 'x' * 10**10 }}",
        "{{ [0] * 10**10 }}",
        "{{ 'x'.center(10**10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    ],
)
def test_a_template_that_takes_all_memory(text):
    before, peak = resource.getrlimit(resource.RLIMIT_AS), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CtxextError, match="it needs more than 256 MB of memory"):
        render_chat(with_template(text), SAID)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 400_000  # In kilobytes.
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize("text", ["{{ messages[0].content }}", "{{ 1 / 0 }}"])
@pytest.mark.parametrize("before", [(resource.RLIM_INFINITY, resource.RLIM_INFINITY), (1 << 50, 1 << 51)])
def test_the_memory_limit_is_set_and_restored(monkeypatch, tmp_path, before, text):
    """As it was noted here, not as the process has it by now, which an earlier rendering may have left behind."""
    (tmp_path / "statm").write_text("1000 500 200 1 0 300 0\n")
    monkeypatch.setattr(chat_template, "_STATM", tmp_path / "statm")
    monkeypatch.setattr(chat_template, "_BYTES_PER_CHARACTER", 0)
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: before)
    monkeypatch.setattr(resource, "setrlimit", lambda *given: limits.append(given))
    with contextlib.suppress(CtxextError):
        render_chat(with_template(text), SAID)
    most = 1000 * resource.getpagesize() + (1 << 28)
    assert limits == [(resource.RLIMIT_AS, (most, before[1])), (resource.RLIMIT_AS, before)]


def test_a_lower_limit_of_memory_stays(monkeypatch):
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1, 2))
    monkeypatch.setattr(resource, "setrlimit", lambda *given: limits.append(given))
    assert render_chat(with_template("{{ messages[0].content }}"), SAID) == "w2"
    assert limits == []


def test_a_template_that_adds_many_tokens():
    with pytest.raises(CtxextError, match="it turns 37 characters into 2000000"):
        render_chat(with_template("{{ 'x y ' * 500000 }}"), SAID)
    long = [{"role": "user", "content": "w2 " * 500_000}]
    assert len(render_chat(with_template("{{ messages[0].content }}{{ messages[0].content }}"), long)) == 3_000_000
