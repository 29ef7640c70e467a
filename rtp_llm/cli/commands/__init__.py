"""The commands, one file each.  Slow imports are inside of functions, so that ``--help`` is quick."""

from rtp_llm.cli.commands.bench import bench
from rtp_llm.cli.commands.doctor import doctor
from rtp_llm.cli.commands.embed import embed
from rtp_llm.cli.commands.export import export
from rtp_llm.cli.commands.generate import generate
from rtp_llm.cli.commands.inspect import inspect
from rtp_llm.cli.commands.load import load
from rtp_llm.cli.commands.models import models
from rtp_llm.cli.commands.plan import plan
from rtp_llm.cli.commands.settings import settings
from rtp_llm.cli.commands.warmup import warmup

COMMANDS = (inspect, plan, warmup, load, generate, embed, export, models, doctor, bench, settings)
