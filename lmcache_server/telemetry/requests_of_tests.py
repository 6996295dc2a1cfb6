"""How the server recognizes the requests of tests, which it counts by themselves."""

SELFTEST = "lmcache selftest "
"""The name of a self-test's model begins with this."""
VERIFY = "lmcache-verify-"
"""The ids of the requests of `lmcache verify` contain this."""
