"""Test webhook signatures with the specification's example and OpenAI's client."""

from __future__ import annotations

import time

import pytest
from openai import InvalidWebhookSignatureError, OpenAI

from cellama.api.webhooks.endpoints import key_of, new_secret, signed_headers


def test_signature_matches_the_specification() -> None:
    headers = signed_headers(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
    )
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_openai_client_accepts_signature() -> None:
    secret = new_secret()
    body = b'{"id":"evt_1","object":"event","type":"batch.completed","created_at":1,"data":{"id":"batch_1"}}'
    headers = signed_headers(secret, "evt_1", int(time.time()), body)
    client = OpenAI(api_key="none", webhook_secret=secret)
    event = client.webhooks.unwrap(body, headers)
    assert (event.type, event.data.id) == ("batch.completed", "batch_1")
    with pytest.raises(InvalidWebhookSignatureError):
        client.webhooks.unwrap(body + b" ", headers)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_c2hvcnQ=", "whsec_!!!", "sk_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"])
def test_invalid_secret_is_rejected(secret: str) -> None:
    with pytest.raises(ValueError, match="the secret must be whsec_"):
        key_of(secret)
