"""Does to itself what a systemd unit asks for, then becomes a program: `confined.py WHAT… -- PROGRAM…`.

WHAT is `capabilities` (none are left), `mdwe` (MemoryDenyWriteExecute=, where the kernel has it) or the name
of a system call; where there is any of these, all others fail with EPERM.
"""

import ctypes
import os
import sys

_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_MDWE = 24, 38, 65
_SCMP_ACT_ALLOW, _SCMP_ACT_EPERM, _NO_SUCH_CALL = 0x7FFF0000, 0x00050001, -1
_libc = ctypes.CDLL(None)


def allow_only(names: list[str]) -> None:
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(_SCMP_ACT_EPERM)))
    for name in names:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number != _NO_SUCH_CALL:
            seccomp.seccomp_rule_add(context, ctypes.c_uint32(_SCMP_ACT_ALLOW), number, 0)
    assert seccomp.seccomp_load(context) == 0


def main() -> None:
    split = sys.argv.index("--")
    what, program = sys.argv[1:split], sys.argv[split + 1 :]
    if "capabilities" in what:
        # A program that root starts has what is left here, and no others.
        for number in range(64):
            _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    if "mdwe" in what:
        _libc.prctl(_PR_SET_MDWE, 1, 0, 0, 0)
    calls = [each for each in what if each not in ("capabilities", "mdwe")]
    if calls:
        assert _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        allow_only(calls)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
