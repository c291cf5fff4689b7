"""Serves one live revision: holds its queue, its dispatcher, its workers, and its invocations' deadlines.

Start reading at `revision.py`. Each part owns its state. A part commands those below it by method calls. It
reports facts to the revision through one interface, `RevisionEvents` (in `replica.py`), which the revision
implements:

    Revision            decides how many workers there are
      Dispatcher        has the queue and its timers; the only part that changes an invocation's state
        Deadlines       has a timer for each invocation
      Pool              starts, picks and stops the replicas
        ZygoteSupervisor  has the zygote that workers are forked from, and the standby
        Replica         has the link of one worker, and knows what was sent to it and has not ended

The decisions are made by `batching` and `scaling`, and processes are started by `launching`. This package
must not know HTTP, jobs or what is deployed.
"""
