"""Track which tokens the KV cells contain, reuse prefixes for new sequences, and save states to RAM and to disk.

This package may import `errors`, `backend`, `events`, `options` and `kvstore`. Memory is accessed through the protocol
`KvMemory`, so llama.cpp is not imported.
"""
