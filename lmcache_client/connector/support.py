"""Which vLLM is served."""

from vllm import __version__ as VLLM_VERSION

from lmcache_client.connector.surface import missing
from lmcache_client.contract.version import INSTALL_VLLM, VERSION, untested


class UnsupportedError(Exception):
    """A vLLM, a model or a setting that is not proven to be restored exactly; the message is a noun phrase
    that names it, as in "this engine is not cached, because it has …"."""


def check_vllm(untested_too: bool) -> None:
    """Raises UnsupportedError for a vLLM that lacks what the connector uses, and, unless `untested_too`, for
    one that the tests do not run."""
    reason = untested(VLLM_VERSION)
    if reason and not untested_too:
        raise UnsupportedError(reason)
    if gone := missing():
        raise UnsupportedError(
            f"vLLM {VLLM_VERSION}, which lacks {', '.join(gone)}: install a version that "
            f"lmcache-mp {VERSION} knows ({INSTALL_VLLM}) or a newer lmcache-mp"
        )
