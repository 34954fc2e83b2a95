"""The fronts by name: a text process finds the front of a reply here."""

from chairlift.apis.front import CHAT, COMPLETION, Front
from chairlift.apis.messages import MessagesFront
from chairlift.apis.responses import ResponsesFront

RESPONSES, MESSAGES = ResponsesFront(), MessagesFront()
FRONTS: dict[str, Front] = {front.name: front for front in (CHAT, COMPLETION, RESPONSES, MESSAGES)}

__all__ = ["CHAT", "COMPLETION", "FRONTS", "MESSAGES", "RESPONSES"]
