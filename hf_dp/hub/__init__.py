"""What a private model carries when it is saved or published, and how others check it. Imports no torch."""

from hf_dp.hub.audited import add_audit
from hf_dp.hub.card_file import set_unreadable_aside, with_what_was_there, write_card
from hf_dp.hub.claim import Check
from hf_dp.hub.record import CARD_FILE, RECORD_FILE, PrivacyRecord
from hf_dp.hub.saved import left_out, model_files, refuse_in_the_way, saved_aside
from hf_dp.hub.source import Source, open_source
from hf_dp.hub.upload import upload
from hf_dp.hub.verify import Verification, load_report, read_earlier, verify

__all__ = [
    "CARD_FILE",
    "RECORD_FILE",
    "Check",
    "PrivacyRecord",
    "Source",
    "Verification",
    "add_audit",
    "left_out",
    "load_report",
    "model_files",
    "open_source",
    "read_earlier",
    "refuse_in_the_way",
    "saved_aside",
    "set_unreadable_aside",
    "upload",
    "verify",
    "with_what_was_there",
    "write_card",
]
