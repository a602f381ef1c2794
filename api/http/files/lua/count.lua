-- Returns the number of a tenant's records, and their bytes. KEYS: the tenant's index. ARGV: prefix of the records' keys, time or ''.
return {usage(KEYS[1], ARGV[1], clock(ARGV[2]))}
