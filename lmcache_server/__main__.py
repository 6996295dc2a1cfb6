"""`python -m lmcache_server` is `lmcache`."""

from lmcache_server.commands.cli import main

if __name__ == "__main__":
    main()
