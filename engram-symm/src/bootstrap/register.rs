use serde::{Deserialize, Serialize};

use super::group::Group;
use super::mesh::unreadable;
use crate::error::{Error, Result, Step};

/// A buffer that all ranks of a group are to have alike. Its ordinal is its place in the list that is registered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// What the buffer is for.
    pub name: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// What its elements are.
    pub dtype: String,
    /// Digest of what decides the buffer's contents: the tables behind it, their layout and format.
    pub digest: u128,
}

impl Registration {
    /// The fields that ranks compare, with their names.
    fn fields(&self) -> [(&'static str, String); 4] {
        [
            ("name", format!("{:?}", self.name)),
            ("bytes", self.bytes.to_string()),
            ("dtype", self.dtype.clone()),
            ("table digest", format!("{:032x}", self.digest)),
        ]
    }
}

impl Group {
    /// Compares this rank's buffers, in their order, with those of all other ranks. Collective; buffers are compared
    /// before anything is allocated for them.
    ///
    /// # Errors
    /// [`Error::Disagreement`] on every rank at the first difference, naming the buffer, the field, and both sides; the
    /// group stays usable. Else as [`Group::all_gather`].
    pub fn register(&mut self, buffers: &[Registration]) -> Result<()> {
        let own = serde_json::to_vec(buffers).expect("plain data has a JSON form");
        let lists = self.gather(Step::Register, &own)?.into_iter().enumerate().map(|(rank, list)| {
            serde_json::from_slice(&list).map_err(|_| unreadable(rank, Step::Register, "not a list of buffers"))
        });
        let lists = lists.collect::<Result<Vec<Vec<Registration>>>>()?;
        (1..lists.len()).find_map(|rank| difference((0, &lists[0]), (rank, &lists[rank]))).map_or(Ok(()), Err)
    }
}

/// The first difference between two ranks' lists.
fn difference(a: (usize, &[Registration]), b: (usize, &[Registration])) -> Option<Error> {
    let pairs = a.1.iter().zip(b.1).enumerate();
    let unequal = pairs.filter(|(_, (ours, theirs))| ours != theirs).find_map(|(ordinal, (ours, theirs))| {
        let fields = ours.fields().into_iter().zip(theirs.fields());
        let ((field, ours_say), (_, theirs_say)) = fields.into_iter().find(|(ours, theirs)| ours != theirs)?;
        let name = if field == "name" { String::new() } else { format!(" ({:?})", ours.name) };
        let what = format!("the {field} of buffer {ordinal}{name}");
        Some(Error::disagreement(what, (a.0, ours_say), (b.0, theirs_say)))
    });
    let count = |list: &[Registration]| match list.last() {
        Some(last) => format!("{}, the last of them {:?}", list.len(), last.name),
        None => "none".to_owned(),
    };
    unequal.or_else(|| {
        (a.1.len() != b.1.len())
            .then(|| Error::disagreement("the number of buffers", (a.0, count(a.1)), (b.0, count(b.1))))
    })
}
