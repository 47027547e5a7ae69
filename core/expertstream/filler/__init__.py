"""Fill slots from checkpoint files: a pool of threads that stage, read past the page cache and commit."""

from expertstream.filler.files import OpenFile, PartRead, RawFile, open_raw_file
from expertstream.filler.filler import Fill, Filler, Ticket

__all__ = ["Fill", "Filler", "OpenFile", "PartRead", "RawFile", "Ticket", "open_raw_file"]
