"""Generated requests against a real server, beside a client whose right answers are known. The command: ../fuzz.py.

values.py        odd values of every type, and a JSON writer that can write wrong JSON
grammars.py      schemas, patterns and choices: good ones, and ones that hurt
talk.py          conversations: good ones, and forged ones
fields.py        the fields of each protocol: how a right value is drawn, and an odd one
bodies.py        fields to bodies: right, odd, hostile, very large
http_faults.py   what is odd about a request around its body
shot.py          one request: bytes, how they are sent, what may be said of the answer
generator.py     request K of seed S
client.py        sends a shot
judge.py         what any answer must be
round_trip.py    text to tokens to text
good.py          the client with known answers
worker.py        the worker from outside: health, memory
campaign.py      all of it at once
report.py        the verdict
"""
