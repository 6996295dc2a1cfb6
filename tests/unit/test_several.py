"""One question to several servers, of which one is lost between the question and the second one."""

import pytest

from lmcache_client.channel import ChannelError, Pending, unsent
from lmcache_client.contract.messages import Found, Message
from lmcache_client.several import Channels, Together
from lmcache_client.transport import System


class Connection:
    """What a question to several servers needs of a channel."""

    system = System()
    ready = True

    def poll(self, pending: Pending | None = None, wait_s: float = 0.0) -> None:
        assert pending is None, "nobody may wait for a question that is answered"


def answered(resume_tokens: int) -> Pending:
    pending = Pending(0.0)
    pending._finish(Found(resume_tokens, 1, 60, ()))
    return pending


@pytest.mark.parametrize("waits_s", [0.0, 5.0])
def test_a_server_that_is_lost_before_it_is_asked_again_ends_the_question(waits_s: float) -> None:
    connection, given_up = Connection(), []

    def merge(replies: list[Message]) -> None:
        assert len(replies) == 2
        together.parts[0] = (together.parts[0][0], unsent("there is no connection"))

    parts = [(connection, answered(512)), (connection, answered(256))]
    together = Together(parts, merge, lambda: given_up.append(True))  # type: ignore[arg-type]
    Channels([connection, connection]).poll(together, waits_s)  # type: ignore[list-item]
    assert together.done
    assert isinstance(together.error, ChannelError)
    assert given_up == [True]
