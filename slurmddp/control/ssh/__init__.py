"""The exchange with a login node over ssh: `connection` and `code` on the laptop, `serve` on the host."""
