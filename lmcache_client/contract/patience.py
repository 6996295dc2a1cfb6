"""How long a lookup may take when the server asks its tiers; both sides wait so long."""


def fetch_patience_s(num_tokens: int) -> float:
    """How long a lookup for a prompt of so many tokens waits for tiers, in seconds."""
    return min(30.0, 2.0 + num_tokens / 10_000)
