"""Reads the file that `engine.urls_file` names: the URLs of engines, one per line."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from async_rl.errors import ConfigError


def is_server(url: str) -> bool:
    """Return whether a text is the URL of a server: a scheme, a host, and no more than a port and a path."""
    try:
        parts = urlsplit(url)
        complete = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is above 65535 or no number, or a bracket is missing
        return False
    return bool(complete) and not (parts.query or parts.fragment)


def read_urls(path: Path) -> tuple[str, ...]:
    """Read the URLs in a file.

    Raises:
        ConfigError: When the file cannot be read or parsed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"engine.urls_file {path} cannot be read: {error}") from error
    return parse_urls(text, str(path))


def parse_urls(text: str, name: str) -> tuple[str, ...]:
    """Parse the URLs of a file, one per line; repeats, empty lines and comments after # are skipped.

    Raises:
        ConfigError: With the line that is not a URL.
    """
    urls: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        url = line.partition("#")[0].strip().rstrip("/")
        if not url:
            continue
        if not is_server(url):
            raise ConfigError(
                f"{name}:{number}: {url!r} is not the URL of a server such as http://10.0.0.7:30000"
            )
        urls[url] = None
    return tuple(urls)
