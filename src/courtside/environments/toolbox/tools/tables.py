"""Look-up tables: weather by city, phone numbers by person, prices by item.

What they say follows from the key by hash: the same in every episode, and nothing a model knows.
"""

from __future__ import annotations

from collections.abc import Sequence

from courtside.environments.toolbox.tools.base import (
    Arguments,
    Parameter,
    RequestDraft,
    Tool,
    ToolFailure,
    ToolState,
)
from courtside.hashing import SeededRandom, digest

CITY_WORDS = """
    Accra Algiers Amsterdam Ankara Athens Baghdad Bangkok Barcelona Belgrade Berlin Bogota Boston
    Brussels Bucharest Budapest Cairo Calgary Caracas Chicago Copenhagen Dakar Dallas Delhi Denver
    Dhaka Doha Dresden Dublin Edinburgh Geneva Glasgow Hamburg Hanoi Havana Helsinki Houston
    Istanbul Jakarta Kabul Kampala Karachi Kyoto Lagos Leipzig Lima Lisbon Ljubljana London Lyon
    Madrid Manila Marseille Melbourne Miami Milan Minsk Montreal Moscow Mumbai Munich Nairobi Naples
    Nice Osaka Oslo Ottawa Palermo Paris Perth Porto Prague Quito Reykjavik Riga Rome Rotterdam
    Santiago Sarajevo Seattle Seoul Seville Shanghai Singapore Sofia Stockholm Sydney Tallinn Tehran
    Tokyo Toronto Tunis Turin Valencia Vancouver Vienna Vilnius Warsaw Yerevan Zagreb
    Zurich
"""
CITIES = tuple(CITY_WORDS.split())
SKIES = ("sunny", "cloudy", "rain", "light wind", "fog", "snow", "storm", "clear")
WEATHER_QUESTIONS = (
    "What is the weather in {city}?",
    "How is the weather in {city} right now?",
    "Do I need an umbrella in {city}?",
    "Tell me the weather in {city}, please.",
    "I am flying to {city}. What is the weather like?",
    "Is it warm in {city} today?",
    "Check the weather for {city}.",
)

FIRST = "Anna Ben Carla David Elena Felix Grace Hugo Ines Jonas Karen Leo Mia Nora Oscar Paula Rosa"
LAST = "Adler Berg Costa Diaz Evans Fischer Garcia Hansen Ito Jensen Keller Lopez Meyer Novak Olsen"
PEOPLE = tuple(f"{first} {last}" for first in FIRST.split() for last in LAST.split())
CONTACT_QUESTIONS = (
    "What is the phone number of {name}?",
    "I need to call {name}. What is the number?",
    "Find the number of {name}.",
    "How can I reach {name} by phone?",
    "Give me {name}'s phone number, please.",
    "Look up {name} for me.",
)

ITEM_WORDS = """
    backpack ball basket bench bicycle blanket book bottle bowl box broom brush bucket cable
    calendar camera candle carpet chair clock coat cup curtain desk drill fan flute fork frame
    guitar hammer hat helmet jacket kettle keyboard kite knife ladder lamp laptop mirror mug
    needle notebook paddle pan pen pencil phone pillow plate pot printer purse puzzle radio
    rake ring rope ruler saddle saw scarf scooter shelf shirt shovel sofa spoon stapler stool
    suitcase table teapot tent ticket toaster torch towel tray tripod vase violin wallet
    watch whistle
"""
ITEMS = tuple(ITEM_WORDS.split())
PRICE_QUESTIONS = (
    "How much does a {item} cost?",
    "What is the price of the {item}?",
    "I want to buy a {item}. What do I pay?",
    "Check what a {item} costs, please.",
    "Tell me the price for one {item}.",
    "Is the {item} expensive? Give me its price.",
)


def _number(key: str, size: int) -> int:
    return int(digest(key)[:12], 16) % size


def _find_option(options: Sequence[str], name: str, what: str) -> str:
    key = " ".join(name.split()).casefold()
    for option in options:
        if option.casefold() == key:
            return option
    raise ToolFailure(f"no {what} '{name}'")


def _weather(state: ToolState, arguments: Arguments) -> str:
    city = _find_option(CITIES, arguments["city"], "weather station for")
    sky = SKIES[_number(f"sky {city}", len(SKIES))]
    return f"{city}: {_number(f'degrees {city}', 40) - 5} °C, {sky}"


def _contact(state: ToolState, arguments: Arguments) -> str:
    name = _find_option(PEOPLE, arguments["name"], "contact named")
    return f"{name}: 555-{_number(f'phone {name}', 10_000):04d}"


def _price(state: ToolState, arguments: Arguments) -> str:
    item = _find_option(ITEMS, arguments["item"], "item called")
    cents = 100 + _number(f"price {item}", 40_000)
    return f"{item}: {cents // 100}.{cents % 100:02d} euros"


def _draft_city(rng: SeededRandom, state: ToolState) -> RequestDraft:
    city = rng.choice(CITIES)
    return RequestDraft({"city": city}, city)


def _draft_person(rng: SeededRandom, state: ToolState) -> RequestDraft:
    name = rng.choice(PEOPLE)
    return RequestDraft({"name": name}, name)


def _draft_item(rng: SeededRandom, state: ToolState) -> RequestDraft:
    item = rng.choice(ITEMS)
    return RequestDraft({"item": item}, item)


TOOLS = {
    "weather": Tool(
        "weather in a city", (Parameter("city"),), _weather, WEATHER_QUESTIONS, _draft_city
    ),
    "contact": Tool(
        "phone number of a person", (Parameter("name"),), _contact, CONTACT_QUESTIONS, _draft_person
    ),
    "price": Tool("price of an item", (Parameter("item"),), _price, PRICE_QUESTIONS, _draft_item),
}
