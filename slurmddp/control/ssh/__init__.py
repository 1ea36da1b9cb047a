"""Exchange requests and code with a login node over ssh.

On the laptop run `connection`, `submit`, `runs`, `statuses` and `send_code`; on the login node run `serve`
and `receive_code`.
"""
