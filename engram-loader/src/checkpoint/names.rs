//! Which tensor names belong to which table.

use engram_core::Family;

/// What may stand before `layers.N.`: nothing for an official Engram export, the others by the wrapper that saved the model.
const PREFIXES: [&str; 5] = ["", "model.", "model.language_model.", "language_model.", "language_model.model."];

/// The scale's name beside the table, by exporter. All of them mean a factor, `weight_scale_inv` too.
pub(crate) const SCALES: [&str; 3] = ["scale", "weight_scale", "weight_scale_inv"];

/// A tensor name under the prefix of some table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TableName<'a> {
    /// Everything before the leaf: `model.layers.1.engram.embed.`.
    pub(crate) table: &'a str,
    pub(crate) family: Family,
    /// The 0-based backbone layer; `None` where the prefix is not one that models use or the layer is no plain number.
    pub(crate) layer: Option<u32>,
    pub(crate) leaf: Leaf,
}

/// What a tensor is to its table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leaf {
    /// All rows.
    Whole,
    /// The rows of one shard.
    Shard {
        /// Which of the two ways of naming shards.
        style: ShardStyle,
        /// The shard's number; numbers past u64 are as much beyond the last shard as any other.
        number: u64,
    },
    Scale,
    Constant(Constant),
    /// Left behind by older exporters and read by nobody.
    Legacy,
    /// Nothing that a table has.
    Unknown {
        /// The name claims to be a scale, so that leaving it out would change every value.
        scale: bool,
    },
}

/// How shards are named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ShardStyle {
    /// `shard_3.weight`
    Underscore,
    /// `shards.3.weight`
    Dot,
}

/// The hash constants that PLE checkpoints may store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Constant {
    Multipliers,
    Sizes,
    Offsets,
}

impl<'a> TableName<'a> {
    /// Recognises a table's tensor; `None` for all others, such as `engram.q_weight`.
    pub(crate) fn parse(name: &'a str) -> Option<Self> {
        const MARKS: [(Family, &str); 2] = [(Family::Engram, ".engram.embed."), (Family::Ple, ".ple.ple_embedding.")];
        let (family, at, mark) = MARKS.iter().find_map(|&(family, mark)| Some((family, name.find(mark)?, mark)))?;
        let (owner, leaf) = (&name[..at], &name[at + mark.len()..]);
        let (prefix, number) = owner.rsplit_once("layers.")?;
        let table = &name[..at + mark.len()];
        let layer = if PREFIXES.contains(&prefix) { plain_number(number) } else { None };
        let layer = layer.and_then(|layer| u32::try_from(layer).ok());
        Some(Self { table, family, layer, leaf: Leaf::parse(family, leaf) })
    }
}

impl Leaf {
    fn parse(family: Family, leaf: &str) -> Self {
        // Engram keeps its one tensor where PLE has a level more.
        let in_table = match family {
            Family::Engram => Some(leaf),
            Family::Ple => leaf.strip_prefix("ngram_embedding."),
        };
        if let Some(part) = in_table {
            if part == "weight" {
                return Self::Whole;
            }
            if SCALES.contains(&part) {
                return Self::Scale;
            }
        }
        if family == Family::Ple {
            match leaf {
                "layer_multipliers" => return Self::Constant(Constant::Multipliers),
                "ngram_heads_vocab_sizes" => return Self::Constant(Constant::Sizes),
                "ngram_heads_offsets" => return Self::Constant(Constant::Offsets),
                _ => {}
            }
            if let Some((style, number)) = in_table.and_then(shard) {
                return Self::Shard { style, number };
            }
        }
        if leaf.split('.').any(|part| part == "token_lookup" || part.starts_with("hashstats_")) {
            return Self::Legacy;
        }
        Self::Unknown { scale: leaf.rsplit('.').next().is_some_and(|last| last.contains("scale")) }
    }
}

fn shard(part: &str) -> Option<(ShardStyle, u64)> {
    let stem = part.strip_suffix(".weight")?;
    let (style, number) = match stem.strip_prefix("shard_") {
        Some(number) => (ShardStyle::Underscore, number),
        None => (ShardStyle::Dot, stem.strip_prefix("shards.")?),
    };
    Some((style, plain_number(number)?))
}

/// A decimal number as programs print it: digits only, no zero in front. Saturates.
fn plain_number(text: &str) -> Option<u64> {
    let plain =
        text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty() && (text == "0" || !text.starts_with('0'));
    plain.then(|| text.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(name: &str) -> Leaf {
        TableName::parse(name).unwrap().leaf
    }

    #[test]
    fn prefixes_and_layers() {
        for prefix in PREFIXES {
            let name = format!("{prefix}layers.14.engram.embed.weight");
            let parsed = TableName::parse(&name).unwrap();
            assert_eq!((parsed.family, parsed.layer, parsed.leaf), (Family::Engram, Some(14), Leaf::Whole), "{name}");
            assert_eq!(parsed.table, format!("{prefix}layers.14.engram.embed."));
        }
        for unplain in ["x.layers.1", "layers.01", "layers.", "layers.-1", "layers.99999999999", "model.model.layers.1"]
        {
            assert_eq!(TableName::parse(&format!("{unplain}.engram.embed.weight")).unwrap().layer, None, "{unplain}");
        }
        let foreign = [
            "layers.1.engram.q_weight",
            "layers.1.engram.wkv.weight",
            "layers.1.engram.embed",
            "engram.embed.weight",
            "model.layers.1.ple.key_proj.weight",
            "",
        ];
        for name in foreign {
            assert_eq!(TableName::parse(name), None, "{name}");
        }
    }

    #[test]
    fn leaves() {
        let ple = |rest: &str| leaf(&format!("model.layers.1.ple.ple_embedding.{rest}"));
        let shard = |style, number| Leaf::Shard { style, number };
        assert_eq!(ple("ngram_embedding.weight"), Leaf::Whole);
        assert_eq!(ple("ngram_embedding.shard_0.weight"), shard(ShardStyle::Underscore, 0));
        assert_eq!(ple("ngram_embedding.shards.10.weight"), shard(ShardStyle::Dot, 10));
        assert_eq!(ple("ngram_embedding.shard_99999999999999999999.weight"), shard(ShardStyle::Underscore, u64::MAX));
        for scale in SCALES {
            assert_eq!(ple(&format!("ngram_embedding.{scale}")), Leaf::Scale);
            assert_eq!(leaf(&format!("layers.1.engram.embed.{scale}")), Leaf::Scale);
            // Not where the table is.
            assert_eq!(ple(scale), Leaf::Unknown { scale: true });
        }
        assert_eq!(ple("layer_multipliers"), Leaf::Constant(Constant::Multipliers));
        assert_eq!(ple("token_lookup"), Leaf::Legacy);
        assert_eq!(ple("hashstats_mean"), Leaf::Legacy);
        assert_eq!(ple("ngram_embedding.token_lookup.weight"), Leaf::Legacy);
        for unknown in
            ["ngram_embedding.shard_01.weight", "ngram_embedding.shard_x.weight", "ngram_embedding.notes", "weight"]
        {
            assert_eq!(ple(unknown), Leaf::Unknown { scale: false }, "{unknown}");
        }
        for scale in [
            "ngram_embedding.shard_0.weight_scale",
            "ngram_embedding.weight_scale_2",
            "ngram_embedding.shards.1.scales",
        ] {
            assert_eq!(ple(scale), Leaf::Unknown { scale: true }, "{scale}");
        }
        assert_eq!(leaf("layers.1.engram.embed.shard_0.weight"), Leaf::Unknown { scale: false });
    }
}
