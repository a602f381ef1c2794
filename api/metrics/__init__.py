"""What belongs to no worker, read from Redis when Prometheus asks: queues, ledger, bulk runs, tenants (ADR 023).

May use: `keys`, and `tasks` but for what runs in workers.
"""
