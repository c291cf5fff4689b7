"""One live revision: its queue, its dispatcher, its workers, and the deadlines of its invocations.

Enter at `revision.py`. The parts are built bottom-up and each owns its state; commands are method calls
downwards, facts are reported upwards through one interface, `RevisionEvents` (in `replica.py`), which the
revision implements:

    Revision            decides how many workers there are
      Dispatcher        the queue and its timers; the only one that changes an invocation's state
        Deadlines       a timer for each invocation
      Pool              the replicas: starts, picks and stops them
        ZygoteSupervisor  the zygote that workers are forked from, and the standby
        Replica         one worker: its link, and what is outstanding at it

Decisions come from `batching` and `scaling`, processes from `launching`. It must not know HTTP, jobs or what
is deployed.
"""
