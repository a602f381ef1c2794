-- Ends a request: it is charged for the tokens that it used, and its leases are deleted. A repeated call changes nothing.
-- KEYS: admissions, charges, jobs. ARGV: id, reserved tokens, used tokens, number of jobs, window (s), time or ''.
local admissions, charges, jobs = KEYS[1], KEYS[2], KEYS[3]
local id, reserved, tokens = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local num_jobs, window, now = tonumber(ARGV[4]), tonumber(ARGV[5]), clock(ARGV[6])
local entry, excess = 'x' .. id, 'xx' .. id

for place = 1, num_jobs do redis.call('ZREM', jobs, lease_of(id, place)) end
charged(admissions, charges, now, window)
if redis.call('ZSCORE', admissions, entry) then
  redis.call('HINCRBY', charges, 'tokens', tokens - tonumber(redis.call('HGET', charges, entry) or 0))
  redis.call('HSET', charges, entry, tokens)
elseif tokens > reserved and not redis.call('ZSCORE', admissions, excess) then
  charge(admissions, charges, excess, now, window, tokens - reserved)
end
