"""The keeper process: accept trainers and pass their messages to duties.

Runs in the keeper process. A *duty* handles all messages about one subject. A message takes
three calls from the socket to its duty: ``Connections`` reads it, ``Server`` finds its handler by
its kind, the handler is a method of the duty. Read in this order:

``server``       attach and detach, liveness of the trainer, the table of messages
``connections``  listener and sockets of the event loop; registration in the runtime folder, renewed
                 if it is removed
``duty``         contract of a duty; the timeline that all of them serve
``duties``       all duties, in the order in which they start and end
``bases``        receive captures and have them written
``auditor``      the background audit: compare a base with the previous base and the log
``recalls``      contents of memory, for a restarted trainer or a reader
"""

from everstep.keeper.process.duty import AttachedTrainer, Handler, ServedTimeline

__all__ = ["AttachedTrainer", "Handler", "ServedTimeline"]
