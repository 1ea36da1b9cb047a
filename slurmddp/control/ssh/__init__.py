"""Exchange requests and code with a login node over ssh.

`connection`, `submit` and `runs` work on the laptop, `serve` on the login node, `code` on both.
"""
