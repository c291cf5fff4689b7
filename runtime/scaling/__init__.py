"""Pure policy of the number of workers: `decide(spec, stats, now)`. No I/O and no clock."""
