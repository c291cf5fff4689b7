"""Where workers come from: the launcher of zygotes and workers, the listener they dial, the node's snapshot fetcher.

Enter at `launcher.py`. Another way of launching (containers, a cluster) belongs here. It must not know queues or HTTP.
"""
