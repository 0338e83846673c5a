"""Studies: measurements that say where a job's time goes. Each writes records, which reports are drawn from."""
