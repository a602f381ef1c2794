-- Jobs go on: their leases are renewed. One whose lease had ended counts again.
-- KEYS: jobs, once for each lease. ARGV: lease (s), time or '', then the leases.
local lease, now = tonumber(ARGV[1]), clock(ARGV[2])
for at, jobs in ipairs(KEYS) do
  redis.call('ZADD', jobs, stamp(now + lease), ARGV[at + 2])
  redis.call('EXPIRE', jobs, lease)
end
