"""`lmcache doctor`: is this machine fit for the server and its engines, and if not, which command helps?"""
