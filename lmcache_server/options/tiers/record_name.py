"""The names of records in a tier."""


def record_name(namespace: bytes, key: bytes, bit: int) -> str:
    """The name of the record of object number `bit` of a chunk."""
    return f"{namespace.hex()}/{key.hex()}.{bit}"
