"""One page about a run: what happened to it, what it cost, what was lost (``everstep report``).

Runs on its own, beside a training that it does not disturb. Read in this order:

``figures``  figures of the run, from its event log and its folder
``page``     the page: its charts, and one file of HTML that needs no network
"""

from everstep.report.figures import RunReport
from everstep.report.page import page_of

__all__ = ["RunReport", "page_of"]
