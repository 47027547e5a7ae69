"""Checkpoint files: what a model's files hold and where, read from their headers alone."""

from expertstream.checkpoint.index import Checkpoint, ExpertLayer, ExpertPart, TensorInfo
from expertstream.checkpoint.opening import open_checkpoint

__all__ = ["Checkpoint", "ExpertLayer", "ExpertPart", "TensorInfo", "open_checkpoint"]
