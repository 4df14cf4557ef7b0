"""The search for the form of requests: no form is tried twice."""

import json

import pytest

from ctxext.server.answers import ServerError
from ctxext.server.negotiation import Negotiation, Request


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": True}, {"variables": {"thinking": False}, "keeps_special": True, "logprobs": True}]
)
def test_no_refused_request_is_sent_again(more):
    sent = []
    request = Request([1, 2], "One", 1, **more)

    def refuse(form):
        sent.append((form.is_chat, json.dumps(form.build(request))))
        raise ServerError("No.", status=400)

    with pytest.raises(ServerError):
        Negotiation().complete(refuse, request)
    assert len({*sent}) == len(sent) > 6
    assert {is_chat for is_chat, _ in sent} == {False, True}
