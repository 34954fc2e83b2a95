"""Prompts for measuring speculation: edits and extractions, which repeat much of the prompt, and free text."""

from __future__ import annotations

_CODE = (
    "def area(width, height):\n    if width < 0 or height < 0:\n        raise ValueError('negative side')\n"
    "    return width * height\n\ndef volume(width, height, depth):\n    if depth < 0:\n"
    "        raise ValueError('negative side')\n    return area(width, height) * depth\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.items.append(item)\n\n    def pop(self):\n        if not self.items:\n"
    "            raise IndexError('the stack is empty')\n        return self.items.pop()\n",
    "import json\n\ndef load_settings(path):\n    with open(path) as file:\n        settings = json.load(file)\n"
    "    settings.setdefault('retries', 3)\n    settings.setdefault('timeout', 30)\n    return settings\n",
    "for (let i = 0; i < orders.length; i++) {\n  const order = orders[i];\n  if (order.status === 'open') {\n"
    "    total += order.price * order.quantity;\n    open.push(order.id);\n  }\n}\nconsole.log(total, open);\n",
    "SELECT customers.name, customers.city, SUM(orders.price) AS total\nFROM customers\n"
    "JOIN orders ON orders.customer = customers.id\nWHERE orders.year = 2025\nGROUP BY customers.name, customers.city\n"
    "ORDER BY total DESC;\n",
)
_TEXT = (
    "The lift opens at nine in the morning and closes at half past four in the afternoon. Children under six ride for "
    "free, and everyone else needs a ticket, which is sold at the station in the valley.",
    "Dear Ms. Brown, thank you for your order of 12 March. The two lamps were sent on 14 March with parcel number "
    "4471-2290 and should arrive by the end of the week. Kind regards, Peter Novak, Lumen Lamps, Vienna.",
    "Name: Alice Moreno\nCity: Lisbon\nPhone: 555-0134\nOrder: 2 chairs, 1 table\n\nName: Tom Baker\nCity: Leeds\n"
    "Phone: 555-0178\nOrder: 4 chairs\n\nName: Mei Tanaka\nCity: Osaka\nPhone: 555-0151\nOrder: 1 lamp, 3 shelves",
    "Water boils at 100 degrees Celsius at sea level. On a mountain of 3000 metres it boils at 90 degrees, since the "
    "pressure of the air is lower there. That is why food takes longer to cook in the mountains.",
    "Meeting of 4 May. Present: Anna, Bilal, Chen. Anna will write the report by Friday. Bilal will call the supplier "
    "on Monday. Chen will test the new pump and send the results to Anna before the next meeting on 18 May.",
)
EDITS = (
    *(f"Write this code again with a comment in its first line, and change nothing else:\n\n{code}" for code in _CODE),
    *(f"Copy this code exactly:\n\n{code}" for code in _CODE),
    *(f"Repeat this text word for word:\n\n{text}" for text in _TEXT),
    *(f"Write this text again in full, with every comma kept, as a quote:\n\n{text}" for text in _TEXT),
)
FREE = (
    *(
        f"Tell me about {topic}."
        for topic in ("the sea", "the history of bread", "black holes", "jazz", "bees", "the number seven", "rivers")
    ),
    *(
        f"Write a short story about {topic}."
        for topic in ("a lost key", "a train at night", "two foxes", "a lighthouse", "an old clock", "a first snow")
    ),
    *(
        f"Explain to a child {topic}."
        for topic in ("why it rains", "how a bicycle stays up", "what money is", "why we sleep", "what a shadow is")
    ),
    "What should I cook tonight, and how?",
    "Why do people climb mountains?",
)
