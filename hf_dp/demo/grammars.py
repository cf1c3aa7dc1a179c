"""Phrase grammars: messages to a shop and a bank's help pages (public), and messages to the bank (private).

A rule is a name and its alternatives; `{name}` in an alternative is expanded in turn.
"""

from __future__ import annotations

Grammar = dict[str, tuple[str, ...]]

FIRST_NAMES = (
    "Ada", "Ben", "Carla", "Dana", "Emil", "Farah", "Greta", "Hugo", "Ines", "Jonas", "Karin", "Luis", "Maya", "Nils",
    "Olga", "Paul", "Rosa", "Samir", "Tilda", "Umar", "Vera", "Willem", "Yara", "Zeno",
)  # fmt: skip
LAST_NAMES = (
    "Abbott", "Becker", "Castro", "Dahl", "Egger", "Fischer", "Garcia", "Haas", "Ivanov", "Jensen", "Keller", "Lopez",
    "Meyer", "Novak", "Olsen", "Petrov", "Quint", "Rossi", "Santos", "Turner", "Urban", "Vogel", "Weber", "Young",
)  # fmt: skip

_PEOPLE: Grammar = {
    "name": ("{first} {last}",),
    "first": FIRST_NAMES,
    "last": LAST_NAMES,
    "digit": tuple("0123456789"),
    "number": ("{digit}{digit}{digit}{digit}",),
    "hello": ("Hello", "Hi", "Good morning", "Good evening", "Dear team"),
}

SHOP: Grammar = {
    **_PEOPLE,
    "start": (
        "{hello}, this is {name}, the number of my order is {number}",
        "{hello}, my order {number} {problem}. {wish}",
        "{hello}, the {item} {problem}. {wish}",
        "{hello}, the {color} {item} that I bought {when} {problem}. {wish}",
        "I bought a {color} {item} {when} and it {problem}. {wish}",
        "This is {name}. The {item} {problem}. {wish}",
        "{question}",
        "{question} {thanks}",
    ),
    "item": ("lamp", "chair", "jacket", "kettle", "phone case", "backpack", "pair of shoes", "blanket", "clock", "mug"),
    "color": ("red", "blue", "green", "black", "white", "grey"),
    "when": ("yesterday", "last week", "on Monday", "two days ago", "in your store", "online"),
    "problem": (
        "has not arrived yet",
        "arrived broken",
        "is too small",
        "is the wrong {color}",
        "does not work",
        "was delivered to the wrong address",
        "is missing a part",
    ),
    "wish": (
        "Please send a new one",
        "I would like my money back",
        "Can I return it?",
        "When will it be here?",
        "What should I do?",
        "{thanks}",
    ),
    "question": (
        "Do you still have the {item} in {color}?",
        "Can I change the address of order {number}?",
        "How long does delivery take?",
        "How can I return a {item}?",
        "Can you tell me the price of the {color} {item}?",
    ),
    "thanks": ("Thank you!", "Thanks for your help.", "Kind regards, {first}"),
}

_BANKING: Grammar = {
    "card": ("debit card", "credit card", "virtual card"),
    "account": ("savings account", "joint account", "current account"),
    "mishap": ("stolen", "lost", "copied", "swallowed by a cash machine"),
    "place": ("cash machine", "supermarket", "petrol station", "restaurant"),
    "entry": ("cash withdrawal", "direct debit", "bank transfer", "card payment"),
    "task": ("verify my identity", "raise my limit", "top up my {account}", "freeze my {card}", "close my {account}"),
    "means": ("in the app", "from abroad", "by telephone", "at a branch"),
}

# What the bank has published: help pages and an open forum. They know its words, less so how customers write to it.
PUBLISHED: Grammar = {
    **_PEOPLE,
    **_BANKING,
    "start": (
        "Block a {mishap} {card} {means}.",
        "Is your {card} {mishap}? {step}",
        "A {card} can be declined at a {place} or a {place}.",
        "To dispute a {entry} or a {entry}, sign a form {means}.",
        "The {entry} is pending. {step}",
        "Can I {task}? Yes, {means}.",
        "I cannot {task} {means}. {step}",
        "What is a {account}? What is a {card}?",
        "{first} asks: where is the {entry} on my {account}?",
        "The {place} would not take the {card}. {step}",
        "The secret code of a {card} is never told to others.",
        "We charge a fee for a {entry} {means}.",
    ),
    "step": ("Look into the app.", "Please call us.", "Is it blocked?", "Your money is safe.", "Why was that? {first}"),
}

BANK: Grammar = {
    **_PEOPLE,
    **_BANKING,
    "start": (
        "{hello}, the {place} kept my {card}. {request}",
        "{hello}, my {card} was {mishap} {moment}. {request}",
        "I see a {entry} on my {account}. {request}",
        "{hello}, the {entry} from {moment} is pending. {request}",
        "My {card} was declined at the {place} {moment}. {request}",
        "{name} here. Why was I charged for a {entry}?",
        "How do I {task} {means}? {closing}",
        "I want to {task} {means}. {closing}",
    ),
    "moment": ("yesterday", "last week", "on Monday", "two days ago", "online"),
    "request": (
        "Please block it.",
        "Please look into this.",
        "Is my money safe?",
        "I would like a refund.",
        "Please call me. {closing}",
        "{closing}",
    ),
    "closing": ("Sincerely, {name}", "Please help. {name}", "Thank you! {first}", "Regards, {first}"),
}
