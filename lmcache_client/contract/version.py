"""The version of this project, shared by server and connector, and the versions of vLLM that it supports."""

VERSION = "0.1.0"

OLDEST_VLLM = (0, 31)
"""Two things rule out vLLM 0.30, and neither shows in a name or an argument list:

* 0.30 does not call `wait_for_save` in a step that computes nothing. Stores start there, so those of such a
  step would be lost, and their blocks held forever.
* 0.30 does not tag the extra keys of a block hash: an adapter `x`, a salt `x` and the same adapter at another
  path all become `('x',)`. A server that outlives its engines could then serve another adapter's pages.

vLLM 0.29 also ends the engine when a load of a hybrid model fails. `connector/surface.json` names the first
version of everything else that the connector uses."""

NEWEST_VLLM = (0, 33)
"""The newest version that the tests run. A later vLLM may keep every name but change a meaning, as 0.31 did,
which would corrupt pages without an error. Its engines therefore run without a cache until it is tested."""

INSTALL_VLLM = f"pip install 'vllm=={NEWEST_VLLM[0]}.{NEWEST_VLLM[1]}.*'"
VLLM_RANGE = f"{OLDEST_VLLM[0]}.{OLDEST_VLLM[1]} to {NEWEST_VLLM[0]}.{NEWEST_VLLM[1]}"
UNTESTED_VLLM_KEY = "lmcache.mp.untested_vllm"


def too_old(vllm_version: str) -> str:
    """The reason not to load the connector in this version of vLLM; empty unless the version is too old."""
    series = _series(vllm_version)
    if series is None or series >= OLDEST_VLLM:
        return ""
    return (
        f"lmcache-mp {VERSION} works with vLLM {VLLM_RANGE} and this is vLLM {vllm_version}: "
        f"install a newer vLLM ({INSTALL_VLLM})"
    )


def untested(vllm_version: str) -> str:
    """The reason not to cache with this version of vLLM unless the user asks for it; empty for a version that
    the tests run, and for one that is too old."""
    series = _series(vllm_version)
    # A development build carries the number of the previous release or of the next one.
    if series is not None and (series, ".dev" in vllm_version) <= (NEWEST_VLLM, False):
        return ""
    return (
        f"vLLM {vllm_version}, and lmcache-mp {VERSION} was tested with vLLM {VLLM_RANGE}: "
        f"install one of these ({INSTALL_VLLM}) or a newer lmcache-mp. To cache anyway, set "
        f'"{UNTESTED_VLLM_KEY}": true in kv_connector_extra_config and check the answers with '
        "'lmcache verify'"
    )


def _series(vllm_version: str) -> tuple[int, int] | None:
    """The first two numbers of the version; None if the build does not know its version."""
    first, _, rest = vllm_version.partition(".")
    second = rest.partition(".")[0].partition("+")[0]
    # A build from a checkout without tags calls itself 0.1.dev…, whatever it contains.
    if not (first.isdecimal() and second.isdecimal()) or vllm_version.startswith("0.1.dev"):
        return None
    return int(first), int(second)
