"""`lmcache doctor`: checks whether this machine can run the server and its engines, and says what helps."""
