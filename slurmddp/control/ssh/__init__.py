"""Exchange requests and code with a login node over ssh.

The modules `connection`, `submit` and `runs` run on the laptop, `serve` on the login node, `code` on both.
"""
