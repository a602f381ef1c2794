-- Renews the leases of jobs in progress. An expired lease is created again.
-- KEYS: jobs, repeated for each lease. ARGV: lease (s), time or '', then the leases.
local lease, now = tonumber(ARGV[1]), clock(ARGV[2])
for at, jobs in ipairs(KEYS) do
  redis.call('ZADD', jobs, stamp(now + lease), ARGV[at + 2])
  redis.call('EXPIRE', jobs, lease)
end
