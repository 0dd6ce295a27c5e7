"""TODO(lead): one line."""
