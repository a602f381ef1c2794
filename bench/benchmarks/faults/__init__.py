"""Workers killed, Redis restarted, hostile payloads: what is lost, torn, done twice or felt by others."""
