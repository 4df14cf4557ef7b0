"""Pauses between the attempts of a request."""

import time

import pytest

from ctxext.errors import CtxextError
from ctxext.files import retrying
from ctxext.files.retrying import call_with_retries, count_pause


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("0", 0.1),
        ("-5", 0.1),
        ("3600", 30.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 30.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0.1),
        *((text, 4.0) for text in (None, "", "soon", "nan", "inf", "1e400", "Fri, 99 Dec 2030")),
    ],
)
def test_a_pause_is_that_of_the_header_or_doubles(header, seconds):
    assert count_pause(header, 2) == seconds
    assert [count_pause(None, attempt) for attempt in (0, 1, 4, 5, 5000)] == [1, 2, 16, 30, 30]


@pytest.mark.parametrize("zone", ["UTC", "America/Los_Angeles"])
@pytest.mark.parametrize("form", ["%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %e %H:%M:%S %Y"])
def test_every_form_of_an_http_date_is_in_utc(form, zone, monkeypatch):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    now = 1_700_000_000.0
    monkeypatch.setattr(retrying.time, "time", lambda: now)
    try:
        assert count_pause(time.strftime(form, time.gmtime(now + 12)), 0) == 12.0
    finally:
        monkeypatch.undo()
        time.tzset()


def test_an_error_that_stays_is_raised(monkeypatch):
    pauses, attempts = [], []
    monkeypatch.setattr(retrying.time, "sleep", pauses.append)

    def fail():
        attempts.append(1)
        raise CtxextError(f"no {len(attempts)}")

    with pytest.raises(CtxextError, match="no 3"):
        call_with_retries(fail, 2, lambda error, attempt: 5.0 + attempt)
    assert pauses == [5.0, 6.0]
    with pytest.raises(CtxextError, match="no 4"):
        call_with_retries(fail, 2, lambda error, attempt: None)
    assert len(pauses) == 2
