//! A list of what mostly is one: a group call to one rank has one part, one answer and one reply.

use std::ops::{Deref, DerefMut};

/// A list that takes no memory of its own for one item.
#[derive(Clone, Debug)]
pub(crate) enum Few<T> {
    One(Option<T>),
    Many(Vec<T>),
}

impl<T> Few<T> {
    /// An empty list, with room for so many.
    pub(crate) fn with_capacity(items: usize) -> Self {
        if items > 1 { Self::Many(Vec::with_capacity(items)) } else { Self::One(None) }
    }

    pub(crate) fn push(&mut self, item: T) {
        match self {
            Self::One(none @ None) => *none = Some(item),
            Self::One(one) => *self = Self::Many(one.take().into_iter().chain([item]).collect()),
            Self::Many(many) => many.push(item),
        }
    }

    /// Takes the item out, if it is the only one and fits.
    pub(crate) fn take_only(&mut self, fits: impl FnOnce(&T) -> bool) -> Option<T> {
        match self {
            Self::One(one) => one.take_if(|item| fits(item)),
            Self::Many(many) if many.len() == 1 && fits(&many[0]) => many.pop(),
            Self::Many(_) => None,
        }
    }

    /// The item, if it is the only one.
    pub(crate) fn into_only(self) -> Result<T, Self> {
        match self {
            Self::One(Some(item)) => Ok(item),
            Self::Many(mut many) if many.len() == 1 => Ok(many.remove(0)),
            other => Err(other),
        }
    }
}

impl<T> Deref for Few<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::One(one) => one.as_slice(),
            Self::Many(many) => many,
        }
    }
}

impl<T> DerefMut for Few<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::One(one) => one.as_mut_slice(),
            Self::Many(many) => many,
        }
    }
}

impl<T> IntoIterator for Few<T> {
    type Item = T;
    type IntoIter = std::iter::Chain<std::option::IntoIter<T>, std::vec::IntoIter<T>>;

    fn into_iter(self) -> Self::IntoIter {
        match self {
            Self::One(one) => one.into_iter().chain(Vec::new()),
            Self::Many(many) => None.into_iter().chain(many),
        }
    }
}

impl<T> FromIterator<T> for Few<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        let items = items.into_iter();
        let mut few = Self::with_capacity(items.size_hint().0);
        items.for_each(|item| few.push(item));
        few
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_any_length_gives_back_what_it_was_given() {
        for length in 0..5_usize {
            let mut few: Few<usize> = (0..length).collect();
            let expected: Vec<usize> = (0..length).collect();
            assert_eq!(few[..], expected[..]);
            few.iter_mut().for_each(|item| *item += 1);
            let only = (length == 1).then_some(1);
            assert_eq!(few.clone().into_only().ok(), only);
            assert_eq!((few.take_only(|_| false), few.clone().take_only(|_| true)), (None, only));
            assert_eq!(few.into_iter().collect::<Vec<_>>(), (1..=length).collect::<Vec<_>>());
        }
    }
}
