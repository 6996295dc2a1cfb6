"""The version of this project, the same for the server and the connector, and of the vLLM that it is for."""

VERSION = "0.1.0"
VLLM_SERIES = "0.32"
"""What the connector uses of vLLM is not public and changes from one series to the next."""


def vllm_refusal(version: str) -> str:
    """Why the connector does not work with this version of vLLM; empty when it does."""
    if version.split(".")[:2] == VLLM_SERIES.split("."):
        return ""
    return (
        f"lmcache-mp {VERSION} works with vLLM {VLLM_SERIES}.x and this is vLLM {version}: install that "
        f"(pip install 'vllm=={VLLM_SERIES}.*'), or a version of lmcache-mp for this one"
    )
