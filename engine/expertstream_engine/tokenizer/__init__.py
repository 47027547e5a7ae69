"""Text to token ids and back, from what a checkpoint's metadata say about its tokenizer."""

from expertstream_engine.tokenizer.text import Tokenizer, TokenStream, load_tokenizer
from expertstream_engine.tokenizer.vocabulary import UnsupportedTokenizer

__all__ = ["TokenStream", "Tokenizer", "UnsupportedTokenizer", "load_tokenizer"]
