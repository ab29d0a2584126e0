"""Files of a corpus wherever they lie: `found` names them, `opened` reads byte ranges of them and notices changes."""
