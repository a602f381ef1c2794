-- What a tenant's records take. KEYS: its index. ARGV: what the keys of records begin with, time or ''. Returns how many there are, their bytes.
return {used(KEYS[1], ARGV[1], clock(ARGV[2]))}
