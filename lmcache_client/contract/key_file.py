"""A key in a file, for TCP connections and for the records of tiers."""

import os

KEY_BYTES = 32


def read_key(path: str) -> bytes:
    """The key in a file: 32 bytes, or 64 hexadecimal digits. Raises ValueError that says what to do."""
    try:
        with open(path, "rb") as file:
            info, content = os.fstat(file.fileno()), file.read(3 * KEY_BYTES)
    except FileNotFoundError:
        raise ValueError(f"there is no {path}: copy it, or make one with 'lmcache key {path}'") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    try:
        key = content if len(content) == KEY_BYTES else bytes.fromhex(content.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"{path} must have {KEY_BYTES} bytes, or twice as many hexadecimal digits")
    # Kubernetes gives a Secret to root and to a group of the pod's processes (fsGroup), which may read it.
    is_ours = info.st_gid in (os.getegid(), *os.getgroups())
    if info.st_mode & (0o027 if is_ours else 0o077):
        fix = f"chmod 600 {path}" if info.st_uid == os.geteuid() else "it is another user's, so make a copy"
        raise ValueError(f"only this user may change {path}, and only its groups may also read it: {fix}")
    return key
