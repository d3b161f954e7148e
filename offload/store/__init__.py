"""AT REST: the files behind the DISK tier, their two sides and the committed generation."""

from offload.store.extents import UnitExtents
from offload.store.files import Extent
from offload.store.format import Record, UnitFlag
from offload.store.store import Store, exists

__all__ = ["Extent", "Record", "Store", "UnitExtents", "UnitFlag", "exists"]
